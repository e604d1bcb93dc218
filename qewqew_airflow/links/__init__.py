"""The link from a task to its queue on the page.

May import no other folder.
"""
