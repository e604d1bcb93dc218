"""The assets of queues and topics, `qewqew://CONNECTION/NAME`.

Imports hooks and shared.
"""
