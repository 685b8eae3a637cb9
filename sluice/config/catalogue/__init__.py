"""How sluice treats every key: it is honoured, mapped, without effect, or refused.

In: `verl.toml` and `sluice.toml`, and the typed schema. Out: one `CatalogueEntry` for each key,
with meaning, type, default, advice, and what happens instead if the key is not honoured.
"""
