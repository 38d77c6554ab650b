"""The pods of one attempt: which are there and which are missing (`members`), kept for the next one (`in_place`) or
spare (`spares`), in which group they are admitted (`group`), of which size the gang is (`elastic`), and what is wrong
with it (`problems`).

Nothing here begins or ends an attempt.
"""
