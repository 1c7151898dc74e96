class MetricWriter:
    def __init__(self,*a):pass
    def write(self,step,v):pass
    def close(self):pass
class Progress:
    def __init__(self,n):pass
    def update(self,step,v):print(step,{k:round(x,4) for k,x in v.items()},flush=True)
    def log(self,l):print(l,flush=True)
    def close(self):pass
