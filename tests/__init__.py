"""The tests. A package, and not a mere folder, because verl's wheel installs a package of the same
name, which would hide a folder."""
