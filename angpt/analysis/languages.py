"""Two short texts in other languages, for models trained on English or on code."""

GERMAN = """\
Am frühen Morgen, lange bevor die ersten Züge fuhren, ging die Müllerin über die schmale Brücke zum Wehr hinunter. Das
Wasser stand hoch, denn es hatte in den Bergen drei Tage lang geregnet, und an den Pfählen hingen Äste, Schilf und ein
zerrissenes Netz. Sie kurbelte das Schütz ein wenig auf, wartete, bis sich der Strudel beruhigte, und schrieb den
Pegelstand mit Bleistift auf ein Brett. Seit neunzehn Jahren stand dort jede Zahl unter der anderen, die älteren längst
verblasst, die neuen schwarz und deutlich. Ihr Bruder hielt das für Zeitverschwendung. Ein Gerät könne das besser, sagte
er, und es müsse dafür nicht aufstehen. Aber das Gerät, das die Gemeinde vor zwei Jahren angeschraubt hatte, war im
ersten Winter eingefroren, und seither fragten die Leute vom Amt wieder bei ihr nach.

Gegen sieben kam der Bäcker mit dem Fahrrad vorbei. Er hielt an, nahm die Mütze ab und erzählte, dass man die Straße
nach Oberau gesperrt habe. Unterhalb der Kapelle sei der Hang ins Rutschen geraten; ein Heuwagen liege quer, verletzt
sei zum Glück niemand. Die Müllerin nickte. Sie hatte so etwas erwartet, denn schon am Vortag war der Bach hinter dem
Haus trüb gewesen, und das bedeutete immer, dass oben Erde in Bewegung war. Sie gab dem Bäcker zwei Eier mit für seine
Mutter und bat ihn, in der Schule Bescheid zu sagen: Die Kinder sollten heute den längeren Weg am Waldrand nehmen.

Danach ging sie in die Mahlstube, strich mit der Hand über den Stein und lauschte. Man hört einer Mühle an, ob sie
zufrieden ist. Wenn das Korn zu feucht ist, klingt sie dumpf; läuft sie leer, so singt sie hell und böse, und man muss
sofort nachschütten, damit die Steine einander nicht zerreiben. An diesem Morgen brummte sie gleichmäßig. Also setzte
sich die Müllerin ans Fenster, schälte einen Apfel und sah zu, wie der Nebel langsam aus dem Tal stieg.
"""

RUSSIAN = """\
Старый маяк стоял на самом краю мыса, там, где берег обрывается прямо в холодную воду. Смотритель поднимался по
винтовой лестнице каждый вечер и всегда считал ступени, хотя давно знал, что их сто двенадцать. Наверху он протирал
стекло, проверял лампу и записывал в тетрадь направление ветра. Если с севера шли низкие облака, он зажигал огонь
раньше, чем полагалось, потому что рыбаки из посёлка не любили возвращаться в темноте.

Однажды в конце октября к нему пришла девочка с корзиной яблок. Она спросила, можно ли увидеть с башни другой берег.
Смотритель ответил, что для этого нужен очень ясный день и немного терпения. Они долго стояли у окна и молчали. Море
было серым, над ним кружили чайки, а вдали медленно двигался корабль с красной трубой. Потом облака разошлись, и на
горизонте появилась тонкая синяя полоса. Девочка засмеялась и сказала, что теперь верит в карту, которая висит в школе.

Зимой дорога к маяку исчезала под снегом, и почту привозили на лыжах. Смотритель топил печь, чинил сети и читал вслух
старые газеты, чтобы не забыть звук собственного голоса. Весной он снова считал ступени, и однажды у него получилось
сто тринадцать. Он вернулся вниз и начал сначала.
"""
