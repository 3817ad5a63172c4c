def register(spark): pass
