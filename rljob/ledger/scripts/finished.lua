-- -> phase | "".
return cmsgpack.pack(redis.call('HGET', STATE, 'phase') or '')
