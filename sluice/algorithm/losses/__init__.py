"""Policy losses, one a file, and their aggregation; `registry` names them. On torch."""
