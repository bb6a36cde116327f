"""Where the sites of each model family are."""
