"""``unbind takedown``: submit a forget set to a running server, see what it binds, follow its job, stop it, try it again."""
