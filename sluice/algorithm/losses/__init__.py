"""Policy losses, one a file, and their aggregation; `registry` names them.

All on torch but `registry`, `settings`, `policy_loss` and `adpo_groups`.
"""
