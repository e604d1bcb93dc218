"""What runs in the triggerer: the triggers, and the watch on files that wakes them.

May import `hooks` and `shared`.
"""
