"""The page of the plugin: `app` has the routes and who may use them, `looking` what it lists, `peeking` records as text.

Only the API server imports it. May import `hooks` and `shared`.
"""
