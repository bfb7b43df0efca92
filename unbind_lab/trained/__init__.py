"""Systems that change weights: one file a loss, ``training.py`` the loop that all of them share."""
