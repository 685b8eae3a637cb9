"""Commands that make, start, scale and stop a run: `init`, `up`, `quickstart`, `recipe`, `prepare`,
`certs`, `scale`, `stop`, `resume`.
"""
