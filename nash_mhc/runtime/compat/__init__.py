"""The package's only uses of private APIs and patches of other libraries, one file per library.

SEEN lists the versions that a file was tested with. Each function says what happens without the private name.
"""
