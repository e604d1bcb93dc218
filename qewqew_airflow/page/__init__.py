"""The page of the plugin: `app` has the routes and who may use them, `contents` what it lists, `batches` the history of
batches, `owners` whether those who leased them live, `samples` what the plots show, `preview` records as text.

Only the API server imports it. May import `hooks` and `shared`.
"""
