"""The link from a task to its queue on the page.

Imports nothing of ours.
"""
