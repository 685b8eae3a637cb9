"""Bearer tokens, certificates, and a certificate authority for development. Files come in;
roles, checked certificates and remedies go out. Below configuration and gRPC: both use it.
"""
