"""minisparse inside other frameworks; each module here needs the framework it is named after."""
