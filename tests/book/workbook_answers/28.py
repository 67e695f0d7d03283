# serving.common_beginning
def common_beginning(text, other):
    count = 0
    while count < min(len(text), len(other)) and text[count] == other[count]:
        count += 1
    return count


# serving.Pages
class Pages:
    def begin(self, ids, others):
        best, most = None, 0
        for number, text in [*others.items(), *self.kept.items()]:
            alike = common_beginning(ids[: len(ids) - 1], text)
            if not self.has_before(number, alike):
                continue
            alike -= alike % self.page_size
            if alike > most:
                best, most = number, alike
        numbers = []
        for cache in self.caches:
            numbers.append(cache.open() if best is None else cache.fork(best))
            cache.truncate(numbers[-1], most)
        if best in self.kept:
            text = self.kept[best]
            del self.kept[best]
            self.kept[best] = text
        return numbers[0]

    def fit(self, tokens):
        table, pages, more = self.caches[0].tables, [], 0
        for number, count in tokens.items():
            pages.extend(table[number])
            more += (count + self.page_size - 1) // self.page_size - len(table[number])
        return len(set(pages)) + more <= self.pages

    def make_room(self, numbers, count):
        cache = self.caches[0]
        for old in list(self.kept):
            if cache.wanted(numbers, count) <= len(cache.unused):
                break
            self.kept.pop(old)
            self.free(old)


# serving.Server
class Server:
    def step(self):
        while self.inside and not self.fit(self.inside):
            self.send_back()
        ready, begun = [], []
        for request in self.inside:
            (ready if self.unread(request) == 1 else begun).append(request)
        if ready:
            self.read(ready, 1)
        left = self.piece
        while left > 0:
            request = begun.pop(0) if begun else self.let_in()
            if request is None:
                break
            count = self.unread(request) if self.unread(request) < left else left
            self.read([request], count)
            left = left - count
        tokens = []
        while self.news:
            tokens.append(self.news.popleft())
        return tokens

    def let_in(self):
        if len(self.inside) >= self.at_once or len(self.waiting) == 0:
            return None
        others = {}
        for request in self.inside:
            length = self.memory.length(request.sequence)
            others[request.sequence] = request.ids[:length]
        first = self.waiting.popleft()
        first.sequence = self.memory.begin(first.ids, others)
        self.inside.append(first)
        if self.fit(self.inside):
            return first
        self.send_back()
        return None

    def send_back(self):
        last = self.inside[-1]
        del self.inside[-1]
        self.waiting.insert(0, last)
        number, last.sequence = last.sequence, None
        self.memory.free(number)

    def read(self, requests, count):
        numbers = [request.sequence for request in requests]
        self.memory.make_room(numbers, count)
        lengths = {number: self.memory.length(number) for number in numbers}
        rows = []
        for request in requests:
            start = lengths[request.sequence]
            rows.append(request.ids[start : start + count])
        states = {
            number: r.generator.get_state()
            for number, r in zip(numbers, requests, strict=True)
        }
        try:
            with torch.inference_mode():
                views = [cache.view(numbers) for cache in self.memory.caches]
                rows = torch.tensor(rows, device=self.model.token_embedding.weight.device)
                padding = views[0].padding
                logits = self.model(rows, cache=views, padding=padding, last=1).cpu()
            found = []
            for request, row in zip(requests, logits[:, 0], strict=True):
                if self.unread(request) == 0:
                    found.append((request, request.next(row)))
        except BaseException:
            for request in requests:
                self.memory.cut(request.sequence, lengths[request.sequence])
                request.generator.set_state(states[request.sequence])
            raise
        for number in numbers:
            self.memory.forget(number)
        for request, (token, _) in found:
            request.ids.append(token)
            self.news.append((request, token))
        for request, (_, over) in found:
            if over != "":
                self.leave(request, over)
