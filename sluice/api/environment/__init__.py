"""Generated from proto/ by tools/generate_protos.py; do not edit."""
