"""Private APIs and patches of libraries: one file per library, and nowhere else in the package.

Each file names the versions it was seen on (SEEN), and each function says what happens without the private name.
"""
