"""The positions of loaders, and what they, their samplers and data sets keep."""
