"""What an evaluation found: stored responses in, statistics, comparisons and a page out.

The numbers are pure functions of the stored responses, so that they can be made again at any time.
"""
