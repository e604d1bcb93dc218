"""The page of the plugin: `app` has the routes and who may use them, `contents` what it lists, `history` the sparklines,
`preview` records as text.

Only the API server imports it. May import `hooks` and `shared`.
"""
