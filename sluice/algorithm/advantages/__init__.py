"""Advantage estimators, one a file; `registry` names them. On torch, but for `registry`."""
