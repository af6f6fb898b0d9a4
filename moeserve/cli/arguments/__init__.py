"""What several subcommands read from a command line: the configuration, and a service's address."""
