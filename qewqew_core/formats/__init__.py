"""Bytes that other programs read and write too, chunk files and zbus's files, and what is known of them. No file is opened here.

It may import the modules beside this folder, and nothing else of ours.
"""
