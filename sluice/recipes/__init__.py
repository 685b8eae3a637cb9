"""Recipes: folders of a published run, and its copy in small that trains on two cores."""
