"""What runs in the triggerer: the triggers, and the watch for changes of files that wakes them.

Imports arguments, hooks and shared.
"""
