"""Who may do what at which socket, by which token or certificate, and what encrypts it."""
