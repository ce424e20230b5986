"""Normalisation, with statistics over cut dimensions."""
