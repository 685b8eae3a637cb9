"""The page of a run. In: the files that the run writes, and answers of its services. Out: curves,
composition of groups, fleet, accounting and samples, as JSON and one page, served live or exported
as one file. Only `web_app` imports aiohttp.
"""
