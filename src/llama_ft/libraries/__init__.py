"""What this package takes from other libraries beyond their documented names: private names, and
evidence from names of arguments and classes. Tables only: nothing here imports these libraries."""
