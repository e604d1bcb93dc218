"""The operators: stage records; lease a batch, acknowledge it, return it; hand one to Spark (alone in needing its provider).

Imports arguments, keys, hooks, shared, assets and links.
"""
