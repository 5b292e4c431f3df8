"""Regression cases of this library, and the peers that ``dataload bench --peers`` measures."""
