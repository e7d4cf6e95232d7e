"""placeholder; replaced by the patterns work"""
