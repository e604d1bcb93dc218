"""The notifier: it stages what became of a task or DAG run.

Imports keys, hooks and shared.
"""
