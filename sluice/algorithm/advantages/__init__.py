"""Advantage estimators, one a file; `registry` names them. NumPy only."""
