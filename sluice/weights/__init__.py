"""The weight wire, both ends: plan, snapshot, process group per epoch, broadcast, digest.

Everything here blocks, runs in threads and ends by a deadline; services wrap it for asyncio.
"""
