"""Who may do what: roles, certificates, and how processes prove themselves to one another."""
