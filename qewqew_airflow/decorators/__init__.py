"""The decorator `@task.qewqew`: it stages what a function yields.

Imports operators.
"""
