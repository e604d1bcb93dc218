"""What makes a store durable and transactional: the seam to the file system, locks, the framing of logs, and the engine.

It may import the modules beside this folder, and nothing else of ours.
"""
