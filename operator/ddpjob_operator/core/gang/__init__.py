"""The pods of one attempt: which are there, which are missing, kept, spare or stuck, and of which size the gang is.

Nothing here begins or ends an attempt.
"""
