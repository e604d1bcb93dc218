"""The decorator ``@task.qewqew``, which stages what a function yields.

May import `operators`.
"""
