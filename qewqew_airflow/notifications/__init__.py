"""The notifier, which stages what became of a task or DAG run.

May import `hooks` and `shared`.
"""
