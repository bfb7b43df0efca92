"""The guard in front of another OpenAI-compatible server: requests are passed on, every text that comes back is followed.

``routes`` take a call in, ``asked`` says what of it the client sent, ``upstream`` asks the other server, ``events`` reads its
stream, ``texts`` finds every text of an answer, and ``following`` lets through what the guards let through.
"""
