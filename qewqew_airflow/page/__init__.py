"""The page of the plugin: `app` has the routes, `asked` what requests say, `permissions` what a user may see and do, `contents`
what is listed, `batches` the history of batches, `actions` what is done to them, `owners` whether their tasks still work on
them, `samples` what the plots show, `preview` records as text.

Only the API server imports it. May import `hooks` and `shared`.
"""
