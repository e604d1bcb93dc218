"""The page of the plugin: `app` has the routes and their permissions, `contents` what it lists, `batches` the history of
batches, `owners` whether their tasks still work on them, `samples` what the plots show, `preview` records as text.

Only the API server imports it. May import `hooks` and `shared`.
"""
