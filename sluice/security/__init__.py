"""Who may call whom: bearer tokens, certificates, and a certificate authority for development."""
