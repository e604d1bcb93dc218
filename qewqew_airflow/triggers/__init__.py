"""What runs in the triggerer: the triggers, and the watch for changes of files that wakes them.

May import `hooks` and `shared`.
"""
