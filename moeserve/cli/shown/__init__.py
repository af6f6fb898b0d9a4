"""What subcommands print: tables, plans, pictures and sizes, as text and as JSON."""
