"""Advantage estimators, each with its paper. A whole train batch comes in; advantages and returns
for each token go out. Everything here needs torch; `sluice.algorithm.registry` names the
estimators without it.
"""
