"""The assets of queues and topics, ``qewqew://CONNECTION/NAME``.

May import `hooks` and `shared`.
"""
